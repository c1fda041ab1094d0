"""Labels for a help centre."""
