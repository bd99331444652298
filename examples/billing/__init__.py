"""Two services on Kafka, with Dishka: one charges cards, the other records payments."""
