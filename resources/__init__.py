"""Files that the console reads at run time: fonts, icons, the style sheet, translations. No code lives here."""
