"""The two servers of a controller: gRPC for our brokers, remoting for Java brokers and mqadmin."""
