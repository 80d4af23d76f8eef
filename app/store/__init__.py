"""Baselines on disk: schema, migrations, saving and comparing, and the exported bundles. No Qt here."""
