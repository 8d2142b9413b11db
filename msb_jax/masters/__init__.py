"""Masters: models of what sets are worth."""
