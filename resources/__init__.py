"""Files that the console reads at run time: fonts, icons, style sheet, translations. No code lives here."""
