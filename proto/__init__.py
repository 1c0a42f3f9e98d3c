"""Wire formats of gRPC and what protoc makes of them; see `make proto`."""
