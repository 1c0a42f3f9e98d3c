"""The base of every process: clocks, sockets, files, settings, a server's main function."""
