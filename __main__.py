"""`python -m regauge` is the command `regauge`."""

from .conf.app import main

if __name__ == "__main__":
    main()
