import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends with several threads until stdin ends, and goes on after errors. The body of a message is its key, filled up.
 * A line {"acked": key, "at": ms} for every SEND_OK, {"failed": key, "why": text, "at": ms} for all else.
 */
final class SendLoop {
    private final DefaultMQProducer producer;
    private final String topic;
    private final int bodySize;
    private final AtomicInteger numbers = new AtomicInteger();
    private volatile boolean stopped;

    SendLoop(DefaultMQProducer producer, String topic, int bodySize) {
        this.producer = producer;
        this.topic = topic;
        this.bodySize = bodySize;
    }

    void run(int count) throws Exception {
        producer.start();
        Thread[] threads = new Thread[count];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(this::produce, "producer-" + i);
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

    private void produce() {
        while (!stopped) {
            String key = "key-" + numbers.getAndIncrement();
            byte[] body = (key + "x".repeat(Math.max(0, bodySize - key.length()))).getBytes(StandardCharsets.UTF_8);
            try {
                SendResult sent = producer.send(new Message(topic, "", key, body));
                if (sent.getSendStatus() == SendStatus.SEND_OK) {
                    Lines.print("acked", key, "at", System.currentTimeMillis());
                } else {
                    Lines.print("failed", key, "why", sent.getSendStatus(), "at", System.currentTimeMillis());
                }
                Thread.sleep(2);
            } catch (InterruptedException error) {
                return;
            } catch (Exception error) {
                Lines.print("failed", key, "why", error, "at", System.currentTimeMillis());
            }
        }
    }
}
