"""Assignment 5: how many batches may be in flight when the next one is prepared?

`limits`, before the run:

    batches      batches of the run
    ends         requests that will end in them, over all rows
    budget       most discarded rows: k
    max_ahead    most batches that may be in flight when the next one is prepared
    compute_us   time of a batch on the GPU
    update_us    time the host needs to collect a batch
    rows         rows of a batch

`seen`, before each batch:

    batch        its number, from 0
    host_us      how long the host took for the batch before; None at first
    in_flight    batches launched and not collected
    finished     how many of these the GPU is done with: they are collected at once
    busy_us      how long the GPU has work for
    ended        a list: rows that ended in each batch collected since the last answer
    discarded    rows known to be discarded so far

Only the standard library is there when this is graded.
"""


class Planner:
    """One planner for one run."""

    def __init__(self, limits):
        raise NotImplementedError

    def ahead(self, seen):
        """A whole number from 0 to `max_ahead`.

        Before the next batch is prepared, the oldest batches in flight are collected
        until no more than this number are left.
        """
        raise NotImplementedError
