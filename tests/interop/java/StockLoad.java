import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * StockLoad NAMESERVERS TOPIC THREADS produce|consume: a client with every setting at its default, until stdin ends.
 * A producer is a SendLoop; a consumer prints a line {"key": key, "at": ms} for every message.
 */
public final class StockLoad {
    public static void main(String[] args) throws Exception {
        if (args[3].equals("consume")) {
            consume(args[0], args[1]);
            return;
        }
        DefaultMQProducer producer = new DefaultMQProducer("stock-producer");
        producer.setNamesrvAddr(args[0]);
        new SendLoop(producer, args[1], 100).run(Integer.parseInt(args[2]));
    }

    private static void consume(String servers, String topic) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("stock-consumer");
        consumer.setNamesrvAddr(servers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                Lines.print("key", message.getKeys(), "at", System.currentTimeMillis());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Lines.print("started", true);
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        consumer.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }
}
