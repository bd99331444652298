"""The first hour: two services on Kafka, with Dishka.  One charges cards, one keeps the books."""
