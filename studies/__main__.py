"""``python -m studies``: see `studies.study`."""

from studies.study import main

if __name__ == "__main__":
    main()
