import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/**
 * Produce NAMESERVERS: for each line `TOPIC COUNT MODE...` of stdin, COUNT messages in every mode, one line per
 * send result, and {"produced": line} in the end. Modes: sync, async, oneway, batch, ordered (queue = number of
 * the message mod 3).
 */
public final class Produce {
    private static DefaultMQProducer producer;
    private static String topic;
    private static int count;

    public static void main(String[] args) throws Exception {
        producer = new DefaultMQProducer("java-producer", Acl.hook());
        producer.setNamesrvAddr(args[0]);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String[] words = line.split(" ");
            topic = words[0];
            count = Integer.parseInt(words[1]);
            for (int i = 2; i < words.length; i++) {
                produce(words[i]);
            }
            Lines.print("produced", line);
        }
        producer.shutdown();
        Lines.print("done", true);
    }

    private static void produce(String mode) throws Exception {
        switch (mode) {
            case "sync":
                for (int i = 0; i < count; i++) {
                    result(mode, key(mode, i), producer.send(message(mode, i)));
                }
                break;
            case "oneway":
                for (int i = 0; i < count; i++) {
                    producer.sendOneway(message(mode, i));
                }
                break;
            case "ordered":
                for (int i = 0; i < count; i++) {
                    SendResult sent = producer.send(
                        message(mode, i), (queues, message, number) -> queues.get((Integer) number % 3), i);
                    result(mode, key(mode, i), sent);
                }
                break;
            case "batch":
                List<Message> batch = new ArrayList<>();
                for (int i = 0; i < count; i++) {
                    batch.add(message(mode, i));
                }
                result(mode, "batch", producer.send(batch));
                break;
            case "async":
                produceAsync(mode);
                break;
            default:
                throw new IllegalArgumentException(mode);
        }
    }

    private static void produceAsync(String mode) throws Exception {
        CountDownLatch open = new CountDownLatch(count);
        for (int i = 0; i < count; i++) {
            String key = key(mode, i);
            producer.send(message(mode, i), new SendCallback() {
                @Override
                public void onSuccess(SendResult sent) {
                    result(mode, key, sent);
                    open.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    Lines.print("mode", mode, "key", key, "error", error);
                    open.countDown();
                }
            });
        }
        open.await();
    }

    private static String key(String mode, int number) {
        return mode + "-" + number;
    }

    private static Message message(String mode, int number) {
        String key = key(mode, number);
        return new Message(topic, "", key, ("body of " + key).getBytes(StandardCharsets.UTF_8));
    }

    private static void result(String mode, String key, SendResult sent) {
        Lines.print("mode", mode, "key", key, "status", sent.getSendStatus(), "msgId", sent.getMsgId(),
            "offsetMsgId", sent.getOffsetMsgId(), "queueId", sent.getMessageQueue().getQueueId(),
            "queueOffset", sent.getQueueOffset());
    }
}
