"""Rooms that will replace the present ones. Nothing public imports them."""
