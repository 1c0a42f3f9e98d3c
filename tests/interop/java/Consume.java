import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/**
 * Consume NAMESERVERS GROUP TOPIC EXPRESSION CLUSTERING|BROADCASTING NAME: a push consumer until stdin ends.
 * A line per message, and a line {"queues": [...]} whenever its share of the topic's queues changes.
 */
public final class Consume {
    public static void main(String[] args) throws Exception {
        String topic = args[2];
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1], Acl.hook());
        consumer.setNamesrvAddr(args[0]);
        consumer.setInstanceName(args[5]);
        consumer.setPollNameServerInterval(1000);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMessageModel(MessageModel.valueOf(args[4]));
        consumer.subscribe(topic, args[3]);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                Lines.print("key", message.getKeys(), "queueId", message.getQueueId(),
                    "queueOffset", message.getQueueOffset(), "msgId", message.getMsgId(),
                    "body", new String(message.getBody(), StandardCharsets.UTF_8));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Lines.print("started", true);
        Thread watch = new Thread(() -> watchQueues(consumer, topic), "watch");
        watch.setDaemon(true);
        watch.start();
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        consumer.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }

    private static void watchQueues(DefaultMQPushConsumer consumer, String topic) {
        List<Integer> before = null;
        while (true) {
            TreeSet<Integer> ids = new TreeSet<>();
            for (MessageQueue queue : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()) {
                if (queue.getTopic().equals(topic)) {
                    ids.add(queue.getQueueId());
                }
            }
            List<Integer> now = new ArrayList<>(ids);
            if (!now.equals(before)) {
                Lines.print("queues", now);
                before = now;
            }
            try {
                Thread.sleep(50);
            } catch (InterruptedException error) {
                return;
            }
        }
    }
}
