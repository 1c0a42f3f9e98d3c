"""Statistics of topics, from stores: volume, sizes, delays, hot queues and slow consumers."""
