import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * StockLoad NAMESERVERS TOPIC THREADS produce|consume: a client with every setting at its default, until stdin ends.
 * A line {"acked": key, "at": ms} for every SEND_OK, {"failed": key} for all else; {"key": key, "at": ms} for every
 * message consumed.
 */
public final class StockLoad {
    private static volatile boolean stopped;

    public static void main(String[] args) throws Exception {
        if (args[3].equals("consume")) {
            consume(args[0], args[1]);
            return;
        }
        DefaultMQProducer producer = new DefaultMQProducer("stock-producer");
        producer.setNamesrvAddr(args[0]);
        producer.start();
        AtomicInteger numbers = new AtomicInteger();
        Thread[] threads = new Thread[Integer.parseInt(args[2])];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> produce(producer, args[1], numbers), "producer-" + i);
            threads[i].start();
        }
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        stopped = true;
        for (Thread thread : threads) {
            thread.join();
        }
        producer.shutdown();
        Lines.print("done", true);
    }

    private static void produce(DefaultMQProducer producer, String topic, AtomicInteger numbers) {
        byte[] body = "x".repeat(100).getBytes(StandardCharsets.UTF_8);
        while (!stopped) {
            String key = "key-" + numbers.getAndIncrement();
            try {
                SendResult sent = producer.send(new Message(topic, "", key, body));
                if (sent.getSendStatus() == SendStatus.SEND_OK) {
                    Lines.print("acked", key, "at", System.currentTimeMillis());
                } else {
                    Lines.print("failed", key, "why", sent.getSendStatus());
                }
                Thread.sleep(2);
            } catch (InterruptedException error) {
                return;
            } catch (Exception error) {
                Lines.print("failed", key, "why", error);
            }
        }
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
