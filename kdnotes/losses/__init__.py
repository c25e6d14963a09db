"Losses against hard and soft targets, and what other systems call them. Knows no models."
