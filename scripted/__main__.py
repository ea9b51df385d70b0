"""`python -m scripted`."""

from scripted.cli import main

if __name__ == "__main__":
    main()
