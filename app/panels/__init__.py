"""The panels of the window. Each draws what `Console` holds and asks it for changes; none owns data."""
