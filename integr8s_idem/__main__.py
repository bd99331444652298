"""Run the command `integr8s-idem` with `python -m integr8s_idem`."""

from integr8s_idem.cli import main

if __name__ == "__main__":
    main()
