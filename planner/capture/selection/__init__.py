"""Rows that data selects, acted on each alone and put back: computed for all rows, a mask lets the selected through."""
