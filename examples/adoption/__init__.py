"""An existing consumer adopts the library: first it observes how often events come twice, then it guards them."""
