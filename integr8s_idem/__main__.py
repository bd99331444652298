"""`python -m integr8s_idem` is the command `integr8s-idem`."""

from integr8s_idem.cli import main

if __name__ == "__main__":
    main()
