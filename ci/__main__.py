"""`python -m ci`."""

from ci.cli import main

if __name__ == "__main__":
    main()
