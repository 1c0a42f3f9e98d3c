import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/**
 * A stock push consumer that reads a backlog and does nothing with it. Each line
 * {@code run TOPIC GROUP COUNT SECONDS} on standard input starts a consumer of a fresh group from the
 * first offset, waits for COUNT messages (at most SECONDS), and is answered by one JSON line with
 * the rate from the first message to the last; {@code quit}.
 */
public final class ConsumeLoad {
    private static final int BATCH = 32;

    public static void main(String[] args) throws Exception {
        System.out.println("{\"ready\":true}");
        try (var input = new java.util.Scanner(System.in)) {
            while (input.hasNextLine()) {
                String[] words = input.nextLine().trim().split(" ");
                if (words[0].equals("quit")) {
                    break;
                }
                System.out.println(
                        run(args[0], words[1], words[2], Long.parseLong(words[3]), Long.parseLong(words[4])));
            }
        }
    }

    private static String run(String nameServers, String topic, String group, long wanted, long limitSeconds)
            throws Exception {
        AtomicLong count = new AtomicLong();
        AtomicLong first = new AtomicLong();
        AtomicLong last = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(BATCH);
        consumer.setPullBatchSize(BATCH);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            first.compareAndSet(0, now);
            long have = count.addAndGet(messages.size());
            if (have >= wanted && last.compareAndSet(0, now)) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        long begin = System.nanoTime();
        consumer.start();
        boolean finished = done.await(limitSeconds, TimeUnit.SECONDS);
        long have = count.get();
        double seconds = ((finished ? last.get() : System.nanoTime()) - first.get()) / 1e9;
        double toFirst = (first.get() - begin) / 1e9;
        consumer.shutdown();
        return String.format(
                java.util.Locale.ROOT,
                "{\"finished\":%b,\"count\":%d,\"seconds\":%.4f,\"perSecond\":%.1f,\"toFirstSeconds\":%.3f}",
                finished, have, seconds, have / seconds, toFirst);
    }

    private ConsumeLoad() {
    }
}
