"""What a process needs of its machine: clocks, sockets, files, settings, a server's main."""
