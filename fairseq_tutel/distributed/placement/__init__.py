"""What each rank holds of the experts: groups, slices, flows of weights."""
