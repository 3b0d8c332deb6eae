"""Placement of experts on ranks: process groups, slices, gathered weights."""
