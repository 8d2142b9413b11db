"""Search, integer programs and bounds for sets of K of L arms."""
