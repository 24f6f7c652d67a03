"""Assignment 3: find the race in an event script, and mend it.

A script is a list of lines, and a line is a dict:

    {"do": "host",    "op": "prepare 0", "reads": [], "writes": ["ids"]}
    {"do": "launch",  "on": "h2d", "op": "h2d 0", "reads": ["ids"], "writes": ["x"]}
    {"do": "record",  "on": "h2d", "event": "h2d_done"}
    {"do": "wait",    "on": "compute", "event": "h2d_done"}
    {"do": "synchronize", "event": "d2h_done"}

Only the standard library is there when this is graded.
"""


def comes_before(script, first, second):
    """True if the script makes `first` end before `second` starts, else False.

    `first` stands above `second`. How long an op takes must not matter.
    """
    ### BEGIN SOLUTION
    return first in knowledge(script)[second]
    ### END SOLUTION


def missing_edge(script):
    """`[first, second]`, the names of two ops that race; None if no two do.

    Of several races take the one whose second op stands first in the script; if there
    are several of these, the one whose first op stands last.
    """
    ### BEGIN SOLUTION
    earlier = knowledge(script)
    ops = [line for line in script if "op" in line]
    for place, second in enumerate(ops):
        for first in reversed(ops[:place]):
            if conflict(first, second) and first["op"] not in earlier[second["op"]]:
                return [first["op"], second["op"]]
    return None
    ### END SOLUTION


def shown(bars):
    """All pairs `[first, second]` that a timeline shows in conflict, in any order.

    A bar is a dict with `op`, `reads`, `writes`, `start_us` and `end_us`. Bars come in
    the order in which they were issued. A pair is in conflict if both touch one array,
    one of them writes it, and the second starts before the first has ended.
    """
    ### BEGIN SOLUTION
    return [
        [first["op"], second["op"]]
        for place, second in enumerate(bars)
        for first in bars[:place]
        if conflict(first, second) and second["start_us"] < first["end_us"]
    ]
    ### END SOLUTION


def mended(script):
    """The script without a race: all its lines, and as few more as you can.

    Only add lines that record, wait or synchronize; a new event needs a name that no
    other line has. Whatever could run at the same time, and does not race, still can.
    """
    ### BEGIN SOLUTION
    script = list(script)
    number = 0
    while edge := missing_edge(script):
        number += 1
        script = with_edge(script, *edge, event=f"mend {number}")
    return script


def knowledge(script):
    """Of each op: the names of all ops that come before it."""
    known, events, earlier = {"host": set()}, {}, {}
    for line in script:
        thread = line.get("on", "host")
        mine = known.setdefault(thread, set())
        if line["do"] == "record":
            events[line["event"]] = set(mine)
        elif "event" in line:  # a wait of a stream, a synchronize of the host
            mine |= events.get(line["event"], set())
        else:
            mine |= known["host"]  # nothing starts before it is launched
            earlier[line["op"]] = set(mine)
            mine.add(line["op"])
    return earlier


def conflict(first, second):
    reads, writes = set(second["reads"]), set(second["writes"])
    return bool(set(first["writes"]) & (reads | writes) or set(first["reads"]) & writes)


def with_edge(script, first, second, event):
    """A record right after the first op, a wait right before the second."""
    result = []
    for line in script:
        if line.get("op") == second:
            if line["do"] == "launch":
                result.append({"do": "wait", "on": line["on"], "event": event})
            else:
                result.append({"do": "synchronize", "event": event})
        result.append(line)
        if line.get("op") == first:
            result.append({"do": "record", "on": line["on"], "event": event})
    return result
    ### END SOLUTION
