"""`python -m infersim` is the same as `infersim`."""

from infersim.cli.app import main

main()
