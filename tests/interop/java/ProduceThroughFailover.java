import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * ProduceThroughFailover NAMESERVERS TOPIC THREADS: sends until stdin ends, and goes on after errors.
 * A line {"acked": key} for every SEND_OK, {"failed": key} for all else.
 */
public final class ProduceThroughFailover {
    private static volatile boolean stopped;

    public static void main(String[] args) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java-producer");
        producer.setNamesrvAddr(args[0]);
        producer.setPollNameServerInterval(1000);
        producer.setRetryTimesWhenSendFailed(5);
        producer.setRetryAnotherBrokerWhenNotStoreOK(true);
        producer.setSendMsgTimeout(5000);
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
        while (!stopped) {
            String key = "key-" + numbers.getAndIncrement();
            try {
                SendResult sent = producer.send(new Message(topic, "", key, key.getBytes(StandardCharsets.UTF_8)));
                if (sent.getSendStatus() == SendStatus.SEND_OK) {
                    Lines.print("acked", key);
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
}
