"""The two servers of a controller: gRPC for BatonMQ's brokers, remoting for RocketMQ's."""
