"""What a load would cost, found out without doing it."""
