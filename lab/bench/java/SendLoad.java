import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Synchronous sends of 1 KiB from a stock producer. The program is told on standard input what to
 * do, one line a window, so that one warm JVM serves many windows, and answers each with one JSON
 * line: {@code run TOPIC THREADS MILLISECONDS} sends for that long, {@code fill TOPIC THREADS COUNT}
 * until so many are acknowledged; {@code quit}.
 */
public final class SendLoad {
    private static final int BODY_BYTES = 1024;

    public static void main(String[] args) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench_producer");
        producer.setNamesrvAddr(args[0]);
        producer.setPollNameServerInterval(1000);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        System.out.println("{\"ready\":true}");
        try (var input = new java.util.Scanner(System.in)) {
            while (input.hasNextLine()) {
                String[] words = input.nextLine().trim().split(" ");
                if (words[0].equals("quit")) {
                    break;
                }
                long limit = Long.parseLong(words[3]);
                boolean timed = words[0].equals("run");
                System.out.println(window(
                        producer, words[1], Integer.parseInt(words[2]),
                        timed ? limit : Long.MAX_VALUE / 2_000_000L, timed ? Long.MAX_VALUE : limit));
            }
        }
        producer.shutdown();
    }

    private static String window(
            DefaultMQProducer producer, String topic, int threads, long millis, long count)
            throws Exception {
        LongAdder acked = new LongAdder();
        LongAdder failed = new LongAdder();
        LongAdder nanos = new LongAdder();
        AtomicLong worst = new AtomicLong();
        AtomicLong tickets = new AtomicLong(count);
        byte[] body = new byte[BODY_BYTES];
        java.util.Arrays.fill(body, (byte) 'x');
        long begin = System.nanoTime();
        long end = begin + millis * 1_000_000L;
        Thread[] senders = new Thread[threads];
        for (int i = 0; i < threads; i++) {
            senders[i] = new Thread(() -> {
                while (System.nanoTime() < end && tickets.getAndDecrement() > 0) {
                    long before = System.nanoTime();
                    boolean good = false;
                    try {
                        SendResult result = producer.send(new Message(topic, "TagA", body));
                        good = result.getSendStatus() == SendStatus.SEND_OK;
                    } catch (Exception e) {
                        // Counted below; a window with failures is reported as such.
                    }
                    long took = System.nanoTime() - before;
                    nanos.add(took);
                    worst.accumulateAndGet(took, Math::max);
                    if (good) {
                        acked.increment();
                    } else {
                        failed.increment();
                        tickets.incrementAndGet();
                    }
                }
            }, "sender-" + i);
            senders[i].start();
        }
        for (Thread sender : senders) {
            sender.join();
        }
        double seconds = (System.nanoTime() - begin) / 1e9;
        long sent = acked.sum();
        return String.format(
                java.util.Locale.ROOT,
                "{\"threads\":%d,\"seconds\":%.3f,\"acked\":%d,\"failed\":%d,\"perSecond\":%.1f,"
                        + "\"meanMs\":%.4f,\"maxMs\":%.2f}",
                threads, seconds, sent, failed.sum(), sent / seconds,
                nanos.sum() / 1e6 / Math.max(1, sent + failed.sum()), worst.get() / 1e6);
    }

    private SendLoad() {
    }
}
