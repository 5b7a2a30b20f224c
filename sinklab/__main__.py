"""`python -m sinklab`, which is what torchrun needs."""

from sinklab.cli import main

if __name__ == "__main__":
    main()
