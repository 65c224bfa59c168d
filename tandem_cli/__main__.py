"""`python -m tandem_cli` is the tandem command."""

from tandem_cli.main import main

main()
