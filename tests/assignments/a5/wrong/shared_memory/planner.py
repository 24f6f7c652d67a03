"""What it remembers belongs to the class, not to the run."""


class Planner:
    rate = 0.3  # requests that end a batch, lately

    def __init__(self, limits):
        self.limits = limits
        self.ended = 0  # requests that are known to have ended
        self.late = []  # batches for which the host took longer than the GPU
        self.last = {}  # batch -> time of the host

    def ahead(self, seen):
        self.remember(seen)
        # Rows that may be discarded beyond one for each request still to end.
        left = self.limits["ends"] - self.ended
        slack = self.limits["budget"] - seen["discarded"] - left
        most = self.limits["max_ahead"]
        if slack < 0:
            depth = 0
        elif slack < 8:
            depth = 1
        else:
            depth = self.wanted(seen["batch"], slack / max(1, left))
            depth = min(depth, 1 + slack // 8)
        if seen["busy_us"] > self.limits["compute_us"] // 2:
            # There is time to collect what is done, and to learn who has ended.
            depth = min(depth, seen["in_flight"] - seen["finished"])
        return max(0, min(depth, most))

    def remember(self, seen):
        batch, host_us = seen["batch"], seen["host_us"]
        if host_us is not None:
            self.last[batch - 1] = host_us
            if host_us > 1.2 * self.limits["compute_us"]:
                self.late.append(batch - 1)
        for rows in seen["ended"]:
            self.ended += rows
            Planner.rate += 0.4 * (rows - self.rate)

    def wanted(self, batch, extra):
        """The depth without a look at the budget; `extra` is slack for each end."""
        period = self.period(batch)
        if period:
            # In three batches at the latest, be as far ahead as the host will be late.
            return max(1, *(self.need(batch + n - period) - n for n in range(3)))
        if self.rate < max(0.15, extra):
            return 3
        return 2 if self.rate < 2 * extra else 1

    def need(self, batch):
        """So many batches the GPU needs for the time that the host took."""
        return -(-self.last.get(batch, 0) // self.limits["compute_us"])

    def period(self, batch):
        """After how many batches late ones come again; 0 if there is no rhythm."""
        recent = [late for late in self.late if late >= batch - 100]
        if batch < 20 or len(recent) < 4:
            return 0
        best, found = 0.75, 0
        for period in range(4, 30):
            later = [late for late in recent if late - period >= max(0, batch - 100)]
            hits = sum(late - period in recent for late in later)
            if len(later) >= 2 and hits / len(later) > best + 0.01:
                best, found = hits / len(later), period
        return found
