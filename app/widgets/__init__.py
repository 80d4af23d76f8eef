"""Widgets that any panel may use. They know the theme and the units, and nothing of engines or sessions."""
