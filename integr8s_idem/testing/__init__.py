"""A test kit for users of the library and for those who write a store.

`integr8s_idem.testing.contract` holds a store to the Protocol; it needs pytest and hypothesis,
this package alone needs neither.
"""
