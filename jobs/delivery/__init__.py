"""Delivery: progress of transfers, and looks at a channel again and again."""
