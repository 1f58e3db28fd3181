"""Many spellings of one computation become one."""
