"""A clock that compilation moves on."""


def slow_to_compile(make, now):
    """Makes each compilation of the steps that ``make`` makes take 1,000 seconds.

    Args:
        make: Makes a step, a function that is compiled when it is traced.
        now: A list of the time, in seconds; changed in place.

    Returns:
        A function to put in the place of ``make``.
    """

    def make_slow(*args, **kwargs):
        step = make(*args, **kwargs)

        def traced(*args):
            now[0] += 1000
            return step(*args)

        return traced

    return make_slow
