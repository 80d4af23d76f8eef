"""Windows that open on top of the main one, only when a person asked for them; none of them blocks."""
