"""The tandem command."""
