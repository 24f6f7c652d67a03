"""As far ahead as possible, whatever it costs."""


class Planner:
    def __init__(self, limits):
        self.limits = limits

    def ahead(self, seen):
        return self.limits["max_ahead"]
