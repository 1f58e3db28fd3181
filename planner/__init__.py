"""The planner decides: a captured model and a spec become a frozen Plan. No process group, no device."""
