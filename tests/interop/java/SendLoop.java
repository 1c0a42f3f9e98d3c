import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends with several threads until stdin ends, and goes on after errors. The body of a message is its key, filled up.
 * A line {"acked": key, "by": broker name, "at": ms} for every SEND_OK, {"failed": key, "why": text, "at": ms} for all else.
 */
final class SendLoop {
    /** One way to send. It prints the outcome, now or later; what it throws is a failure. */
    interface Way {
        void send(int thread, int number) throws Exception;
    }

    /** Of each thread, from a send to the next. */
    private static final int PAUSE_MS = Integer.getInteger("pause.ms", 2);
    private final String topic;
    private final int bodySize;
    private final AtomicInteger numbers = new AtomicInteger();
    private volatile boolean stopped;

    SendLoop(String topic, int bodySize) {
        this.topic = topic;
        this.bodySize = bodySize;
    }

    /** Each message by itself, the answer awaited; keys are PREFIX-NUMBER. */
    Way sync(DefaultMQProducer producer, String prefix) {
        return (thread, number) -> {
            String key = prefix + "-" + number;
            try {
                outcome(producer.send(message(key)), key);
            } catch (InterruptedException error) {
                throw error;
            } catch (Exception error) {
                failed(error, key);
            }
        };
    }

    Message message(String key) {
        String body = key + "x".repeat(Math.max(0, bodySize - key.length()));
        return new Message(topic, "", key, body.getBytes(StandardCharsets.UTF_8));
    }

    static void outcome(SendResult sent, String... keys) {
        if (sent.getSendStatus() != SendStatus.SEND_OK) {
            failed(sent.getSendStatus(), keys);
            return;
        }
        String broker = sent.getMessageQueue().getBrokerName();
        for (String key : keys) {
            Lines.print("acked", key, "by", broker, "at", System.currentTimeMillis());
        }
    }

    static void failed(Object why, String... keys) {
        for (String key : keys) {
            Lines.print("failed", key, "why", why, "at", System.currentTimeMillis());
        }
    }

    /** So many threads that send in this way until `stop`. */
    Thread[] start(Way way, int count) {
        Thread[] threads = new Thread[count];
        for (int i = 0; i < count; i++) {
            int thread = i;
            threads[i] = new Thread(() -> produce(way, thread), "producer-" + i);
            threads[i].start();
        }
        return threads;
    }

    void stop(Thread[] threads) throws InterruptedException {
        stopped = true;
        for (Thread thread : threads) {
            thread.join();
        }
    }

    /** One producer, `count` threads, until stdin ends. */
    void run(DefaultMQProducer producer, int count) throws Exception {
        producer.start();
        Thread[] threads = start(sync(producer, "key"), count);
        awaitEnd();
        stop(threads);
        producer.shutdown();
        Lines.print("done", true);
    }

    static void awaitEnd() throws Exception {
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
    }

    private void produce(Way way, int thread) {
        while (!stopped) {
            try {
                way.send(thread, numbers.getAndIncrement());
                Thread.sleep(PAUSE_MS);
            } catch (InterruptedException error) {
                return;
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        }
    }
}
