"""Hostile input where somebody could gain something: a run, a skip, another's response, a word on a terminal."""
