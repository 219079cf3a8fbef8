"""Arithmetic of layouts, indices, selections and read plans; opens nothing."""
