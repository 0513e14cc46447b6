"""A clock that compilation advances."""


def slow_to_compile(make, now):
    """Advances a clock by 1,000 seconds for each compilation of a step.

    Args:
        make: Makes a step, a function that is traced once for each compilation.
        now: A list with the time, in seconds; changed in place.

    Returns:
        A function to use instead of ``make``.
    """

    def make_slow(*args, **kwargs):
        step = make(*args, **kwargs)

        def traced(*args):
            now[0] += 1000
            return step(*args)

        return traced

    return make_slow
