"""Admin calls to name servers, brokers and controllers."""
